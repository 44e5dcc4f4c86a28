"""A lab on one host: the DPU's processes, guests joined by it, and what is run in them.

`run-vm.sh`, the VM tests and the benchmarks all bring systems up through this package, so that there
is one place that knows how a guest is started. Python's standard library only.
"""
