module rolloutfleet.io/dev/pause

go 1.26.0
