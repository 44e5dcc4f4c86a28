//! A hostile mlx5 driver beside a neighbour: the cases of em-device's own tests, decided by bytes.

#![no_main]

use em_device::rdma::front::mlx5::fuzzing;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| fuzzing::run(bytes));
