# SPDX-License-Identifier: Apache-2.0
"""A simulated cluster that drives the real controller: thousands of nodes and days of training, in minutes."""
