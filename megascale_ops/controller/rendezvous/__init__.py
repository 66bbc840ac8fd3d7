# SPDX-License-Identifier: Apache-2.0
"""What runners ask for: join a round, poll for orders, leave, be adopted by a new controller."""
