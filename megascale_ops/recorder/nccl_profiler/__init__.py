# SPDX-License-Identifier: Apache-2.0
"""The NCCL profiler plugin: C sources that are built on first use, and their builder."""
