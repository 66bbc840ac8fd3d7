# SPDX-License-Identifier: Apache-2.0
"""Black boxes and journal together, drawn: the trace of the last steps, and the report of a whole run."""
