# SPDX-License-Identifier: Apache-2.0
"""What goes up to the controller, and how much of it."""
