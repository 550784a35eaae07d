"""One line inside the frameworks people already use; each is imported only when it is used."""
