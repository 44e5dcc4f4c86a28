//! Tells the compiler that `--cfg loom` exists: `RUSTFLAGS="--cfg loom"` builds the ring alone, on
//! loom's atomics, for its exhaustive tests.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rustc-check-cfg=cfg(loom)");
}
