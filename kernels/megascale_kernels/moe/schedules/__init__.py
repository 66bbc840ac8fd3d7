# SPDX-License-Identifier: Apache-2.0
"""Schedules of mixtures of experts on collectives: what is in flight while what is multiplied."""
