"""Machines of other people, which join by an invite: no ssh, no key exchanged beforehand."""
