//go:build tools

// Package tools pins the KWOK controller that plays the fake nodes of the local cluster.
package tools

import _ "sigs.k8s.io/kwok/cmd/kwok"
