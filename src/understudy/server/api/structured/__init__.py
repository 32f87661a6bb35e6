"""Structured answers: texts of a given form, equal for equal requests.

A JSON schema is checked (`document`), its alternatives are searched (`solver`), and every value is checked against
the schema (`validator`) before it is answered.
"""
