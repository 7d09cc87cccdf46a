"""What the data path costs beside its floors and beside what users have today: one module per benchmark, ``make bench-NAME`` runs one."""
