"""The benchmark: which explanation is true?"""
