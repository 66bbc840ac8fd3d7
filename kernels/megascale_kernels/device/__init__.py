# SPDX-License-Identifier: Apache-2.0
"""What device code is made of: flags and signals, tiles, products, progress words, the barrier of all ranks."""
