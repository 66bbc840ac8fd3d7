# SPDX-License-Identifier: Apache-2.0
"""Statistics that several detectors share: thresholds for false alarms, samples of ranks, work in pieces."""
