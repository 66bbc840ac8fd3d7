# SPDX-License-Identifier: Apache-2.0
"""How torch sees the operators: functions, custom ops, autograd, layers, parallel styles."""
