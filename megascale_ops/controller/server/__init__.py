# SPDX-License-Identifier: Apache-2.0
"""HTTP in and out: who is let in, for how long, and what is no request."""
