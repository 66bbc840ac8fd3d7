# SPDX-License-Identifier: Apache-2.0
"""What the journal is made of: sealed rows, what grows in rows of its own, one writer, and a bound on its size."""
