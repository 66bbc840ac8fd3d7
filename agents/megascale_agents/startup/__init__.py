# SPDX-License-Identifier: Apache-2.0
"""What happens once, before the agent's loop: imports put off, memory kept small, one agent a node."""
