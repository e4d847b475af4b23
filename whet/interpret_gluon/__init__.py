"""Gluon's kernels on the CPU, where Triton has no interpreter for them: `engines`, what Hopper does beside its warps, under a
schedule; `values`, what kernels compute with; `language`, Gluon over both."""
