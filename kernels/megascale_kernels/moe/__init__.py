# SPDX-License-Identifier: Apache-2.0
"""Mixture of experts over ranks: tokens travel while experts multiply, and their results while others multiply."""
