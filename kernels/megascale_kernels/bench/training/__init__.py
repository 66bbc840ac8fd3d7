# SPDX-License-Identifier: Apache-2.0
"""Measure training steps: MLP blocks under tensor and sequence parallelism, forward and backward, by torch and by ours.

`python -m megascale_kernels.bench train --gpus N`. `arguments` reads the command line, `model` is what is trained,
`variants` the ways to run it, `steps` times them in turn, `table` says what came out, `command` puts these together.
"""
