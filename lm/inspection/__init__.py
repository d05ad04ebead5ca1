"""Looking at a run, its data and its model: functions that return numbers, and beside them others that draw them.

The notebooks are short calls of these; each stands alone and is as good in a script.
"""
