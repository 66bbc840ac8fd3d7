# SPDX-License-Identifier: Apache-2.0
"""Measure the overlap operators against NCCL + cuBLAS in series and torch's fused operators, on the GPUs of one host.

`python -m megascale_kernels.bench {ag_gemm,gemm_rs} --gpus N` starts its own ranks. One module for each part:
`shapes` what to measure, `sweep` how, `rows` the figures derived from it, `report` the table and the CSV, `overheads`
what progress and trace cost, `soak` the long run that looks for wrong elements, `ranks` the processes. At random:
`drawn` which (of the models in `published`), `drawn_sweep` how, `drawn_rows` and `drawn_summary` what is said of them.
"""
