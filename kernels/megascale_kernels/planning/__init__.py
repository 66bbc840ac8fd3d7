# SPDX-License-Identifier: Apache-2.0
"""What is decided before a launch: configuration, tile order, tiling, the timetable of the gather, costs."""
