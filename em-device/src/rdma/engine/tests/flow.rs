//! Waiting, retrying, giving up.
