# SPDX-License-Identifier: Apache-2.0
"""Which of several controllers on one PostgreSQL leads."""
