{{- define "trainmaster.name" -}}
{{- if contains .Chart.Name .Release.Name -}}
{{ .Release.Name | trunc 52 | trimSuffix "-" }}
{{- else -}}
{{ printf "%s-%s" .Release.Name .Chart.Name | trunc 52 | trimSuffix "-" }}
{{- end -}}
{{- end -}}

{{- define "trainmaster.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "trainmaster.labels" -}}
{{ include "trainmaster.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
{{- end -}}

{{- define "trainmaster.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end -}}

{{- define "trainmaster.serviceAccount" -}}
{{ .Values.serviceAccount.name | default (include "trainmaster.name" .) }}
{{- end -}}

{{- define "trainmaster.claim" -}}
{{ .Values.storage.existingClaim | default (include "trainmaster.name" .) }}
{{- end -}}

{{- define "trainmaster.scheme" -}}
{{ ternary "https" "http" (ne .Values.tls.secret "") }}
{{- end -}}

{{- define "trainmaster.url" -}}
{{ include "trainmaster.scheme" . }}://{{ include "trainmaster.name" . }}.{{ .Release.Namespace }}.svc:{{ .Values.service.port }}
{{- end -}}

{{/* The declared clusters, with what the chart knows of the one that the server runs in. */}}
{{- define "trainmaster.clusters" -}}
{{- $clusters := dict -}}
{{- range $name, $given := .Values.clusters -}}
{{- $cluster := dict -}}
{{- range $key, $value := $given -}}
{{- if not (kindIs "invalid" $value) -}}
{{- $_ := set $cluster $key $value -}}
{{- end -}}
{{- end -}}
{{- if and (eq $cluster.kind "kubernetes") (not $cluster.kubeconfig) -}}
{{- $_ := set $cluster "namespace" ($cluster.namespace | default $.Release.Namespace) -}}
{{- $_ := set $cluster "image" ($cluster.image | default (include "trainmaster.image" $)) -}}
{{- end -}}
{{- $_ := set $clusters $name $cluster -}}
{{- end -}}
{{ toJson $clusters }}
{{- end -}}

{{/* The namespaces, as a JSON list, in which the server itself runs jobs. */}}
{{- define "trainmaster.jobNamespaces" -}}
{{- $namespaces := list -}}
{{- range fromJson (include "trainmaster.clusters" .) -}}
{{- if and (eq .kind "kubernetes") (not .kubeconfig) -}}
{{- $namespaces = append $namespaces .namespace -}}
{{- end -}}
{{- end -}}
{{ $namespaces | uniq | sortAlpha | toJson }}
{{- end -}}

{{/* A value as TOML, which writes texts, numbers and lists as JSON does. */}}
{{- define "trainmaster.toml" -}}
{{- if kindIs "map" . -}}
{ {{- range $index, $key := keys . | sortAlpha }}{{ if $index }},{{ end }} {{ toJson $key }} = {{ include "trainmaster.toml" (get $ $key) }}{{ end }} }
{{- else if kindIs "slice" . -}}
[{{- range $index, $value := . }}{{ if $index }}, {{ end }}{{ include "trainmaster.toml" $value }}{{ end -}}]
{{- else -}}
{{ toJson . }}
{{- end -}}
{{- end -}}

{{/* The settings file. */}}
{{- define "trainmaster.config" -}}
{{- $own := dict
  "host" "0.0.0.0" "port" 7070 "runs_root" "/srv/trainmaster/runs" "artifacts_root" "/srv/trainmaster/artifacts"
  "data_roots" (list "/srv/trainmaster/data")
  "advertise_url" (.Values.advertiseUrl | default (include "trainmaster.url" .)) "log_format" "json"
  "backends" (keys .Values.clusters | sortAlpha) "open_metrics" .Values.metrics.open -}}
{{- if .Values.tls.secret -}}
{{- $_ := set $own "tls_cert" "/etc/trainmaster/tls/tls.crt" -}}
{{- $_ := set $own "tls_key" "/etc/trainmaster/tls/tls.key" -}}
{{- if .Values.tls.ca -}}
{{- $_ := set $own "ca" "/etc/trainmaster/tls/ca.crt" -}}
{{- end -}}
{{- else -}}
{{- $_ := set $own "behind_proxy" true -}}
{{- end -}}
{{- $settings := merge (deepCopy .Values.settings) $own -}}
{{- range $key := keys $settings | sortAlpha }}
{{- $value := get $settings $key }}
{{- if not (or (kindIs "map" $value) (kindIs "invalid" $value)) }}
{{ $key }} = {{ include "trainmaster.toml" $value }}
{{- end }}
{{- end }}
{{- $tables := merge (dict "clusters" (fromJson (include "trainmaster.clusters" .))) $settings -}}
{{- range $table := keys $tables | sortAlpha }}
{{- if kindIs "map" (get $tables $table) }}
{{- $entries := get $tables $table }}
{{- range $name := keys $entries | sortAlpha }}

[{{ $table }}.{{ if regexMatch "^[A-Za-z0-9_-]+$" $name }}{{ $name }}{{ else }}{{ toJson $name }}{{ end }}]
{{- $entry := get $entries $name }}
{{- range $key := keys $entry | sortAlpha }}
{{ $key }} = {{ include "trainmaster.toml" (get $entry $key) }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}
{{- end -}}

{{/* What the schema cannot say. */}}
{{- define "trainmaster.check" -}}
{{- if not .Values.image.repository -}}
{{- fail "image.repository: build deploy/Dockerfile, push the image to a registry that the cluster pulls from, and name it here" -}}
{{- end -}}
{{- $instead := dict
  "host" "it is 0.0.0.0" "port" "use service.port" "advertise_url" "use advertiseUrl" "database_url" "use database.secret"
  "secret_key" "use keys.secret" "old_secret_keys" "use the key old-secret-keys of keys.secret"
  "tls_cert" "use tls.secret" "tls_key" "use tls.secret" "behind_proxy" "it follows from tls.secret" "ca" "use tls.ca"
  "open_metrics" "use metrics.open" "data_dir" "it is /data, private to each pod" "clusters" "use clusters"
  "runs_root" "it is on the volume of storage" "artifacts_root" "it is on the volume of storage" -}}
{{- range $key, $_ := .Values.settings -}}
{{- with get $instead $key -}}
{{- fail (printf "settings.%s: the chart sets this itself; %s" $key .) -}}
{{- end -}}
{{- end -}}
{{- if and (gt (int .Values.replicas) 1) (ne .Values.storage.accessMode "ReadWriteMany") -}}
{{- fail (printf "storage.accessMode: %s is for one pod, and replicas is %v: use a storage class with ReadWriteMany, or one replica" .Values.storage.accessMode .Values.replicas) -}}
{{- end -}}
{{- if and .Values.tls.ca (not .Values.tls.secret) -}}
{{- fail "tls.ca: needs tls.secret, the Secret that has ca.crt" -}}
{{- end -}}
{{- end -}}
