"""Before training: is every rank there, are all of one mind, and are the links what the plan took them for?"""
