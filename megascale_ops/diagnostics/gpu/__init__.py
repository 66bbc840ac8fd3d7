# SPDX-License-Identifier: Apache-2.0
"""Checks of GPUs and of what joins them; torch is imported in their processes only."""
