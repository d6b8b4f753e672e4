"""What can go wrong that is not our bug. One sentence each: what, where, and what to do about it.

    Error
    ├── InputError        the user's file, text or argument
    ├── DatastoreError    missing, incomplete, another format version, or built with another model
    └── ModelError        this model cannot give states or steps the way we need

The library raises these and neither prints nor exits; the command line prints one line and exits 2.
"""


class Error(Exception):
    """Whatever a user can put right."""


class InputError(Error):
    """The user's file, text or argument: path:line, what was read, what was expected."""


class DatastoreError(Error):
    """The datastore is missing, incomplete, of another format version, or built with another model."""


class ModelError(Error):
    """This model cannot give states or steps the way we need."""
