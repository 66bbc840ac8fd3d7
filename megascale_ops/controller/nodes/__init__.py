# SPDX-License-Identifier: Apache-2.0
"""The life of each node as a machine: one table, its deadlines, its limits, and the book of all moves. Pure."""
