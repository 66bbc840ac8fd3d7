# SPDX-License-Identifier: Apache-2.0
"""The ranks of this node as processes: started, or woken from a warm pool; watched, stopped, swept up afterwards."""
