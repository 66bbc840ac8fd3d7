# SPDX-License-Identifier: Apache-2.0
"""The benchmark of whole MoE layers: ours, plain torch, and a tuned serial path, in turn."""
