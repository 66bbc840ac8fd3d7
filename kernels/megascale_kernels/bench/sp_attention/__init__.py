# SPDX-License-Identifier: Apache-2.0
"""`python -m megascale_kernels.bench attention`: attention over a cut sequence against NCCL and torch's own.

heads       sizes of published models, and cases drawn at random
requests    the command line
contenders  what is timed, on one case's tensors
figures     what follows from the times, and how a row reads
sequences   start the ranks, measure case after case
"""
