//! Which link a frame leaves by.

