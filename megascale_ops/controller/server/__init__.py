# SPDX-License-Identifier: Apache-2.0
"""HTTP in and out: who is let in, for what and for how long, and what is no request."""
