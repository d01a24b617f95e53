"""tahq's codecs in other people's trainers: a module for each runtime, imported by nothing in tahq."""
