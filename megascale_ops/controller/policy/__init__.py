# SPDX-License-Identifier: Apache-2.0
"""What is done about a verdict: rules, budgets, and the settings that a user may change."""
