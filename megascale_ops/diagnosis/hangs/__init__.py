# SPDX-License-Identifier: Apache-2.0
"""Silence and evidence in, a verdict with its patience out."""
