# SPDX-License-Identifier: Apache-2.0
"""What a run has beside its ranks: a controller and an agent, its own or others, and the NCCL profiler plugin."""
