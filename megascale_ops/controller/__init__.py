# SPDX-License-Identifier: Apache-2.0
"""The controller: sees all nodes, judges, journals, and drives recovery. See README.md beside this file."""
