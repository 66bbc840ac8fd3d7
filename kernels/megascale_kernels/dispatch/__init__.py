# SPDX-License-Identifier: Apache-2.0
"""Which of the ways of computing an operator is taken for given operands, and the serial way itself."""
