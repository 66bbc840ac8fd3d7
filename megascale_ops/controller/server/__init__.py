# SPDX-License-Identifier: Apache-2.0
"""HTTP in and out: which connections are taken, for how long, and what is no request."""
