# SPDX-License-Identifier: Apache-2.0
"""Whose a job is, and nothing done for it that its owner could not do himself."""
