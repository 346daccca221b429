"""Pages for people: the status page at / and the API's description at /docs. Both come whole from here."""
