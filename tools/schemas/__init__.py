"""Descriptions of understudy's JSON outputs, by part of the program."""
