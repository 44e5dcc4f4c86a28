//! A ConnectX-compatible function: what the stock `mlx5_core` and `mlx5_ib` drivers talk to.
