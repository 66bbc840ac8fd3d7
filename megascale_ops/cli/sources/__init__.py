# SPDX-License-Identifier: Apache-2.0
"""Where answers come from: a running controller, the journal of a finished run, black boxes."""
