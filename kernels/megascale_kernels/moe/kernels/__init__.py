# SPDX-License-Identifier: Apache-2.0
"""What of a mixture of experts runs on the device: routing, the two products, what only a backward has."""
