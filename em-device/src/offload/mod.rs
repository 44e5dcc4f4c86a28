//! Checksums and TCP segmentation in software.
