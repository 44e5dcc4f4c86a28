//! Front ends: one folder for each driver whose device a guest can see.

pub mod mlx5;
