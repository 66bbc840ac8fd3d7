# SPDX-License-Identifier: Apache-2.0
"""What black boxes and journal tell together, drawn: the trace of the last steps, and the report of a whole run."""
