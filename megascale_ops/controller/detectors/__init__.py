# SPDX-License-Identifier: Apache-2.0
"""Detectors that run beside the state machine and keep warnings true: stragglers, skew, hardware, profiles."""
